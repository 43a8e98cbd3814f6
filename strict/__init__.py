"""Documents of others and of users, read strictly.

May import: nothing.
"""
