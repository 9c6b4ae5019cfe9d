"""Makes the tables and figures of the AdaFuse paper (arXiv 2601.06022) on other models and questions.

`experiments` says what each is made of, `runs` asks the questions, and `report` and `plots` show the scores.
"""
