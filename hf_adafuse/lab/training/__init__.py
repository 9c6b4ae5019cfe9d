"""How the members that ship with the package were trained."""
