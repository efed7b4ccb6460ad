"""A plan as one page that needs nothing else: a module a section, page.py puts them together."""
