"""Models behind servers: what is asked of one, in the shapes that each kind of server knows, over HTTP that may fail.
Must not know: trees, text, words, other members.
"""
