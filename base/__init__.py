"""What every room stands on: errors, strict documents, add-ons, whole files, and how numeric code is compiled.

May import: nothing.
"""
