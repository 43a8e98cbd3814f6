"""How numeric code is compiled, for every room that has some."""
