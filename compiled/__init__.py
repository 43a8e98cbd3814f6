"""What every room stands on: how numeric code is compiled, names of array types, the root of all errors.

May import: nothing.
"""
