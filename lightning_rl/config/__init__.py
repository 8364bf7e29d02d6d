"""Configurations: constructors and files read alike, and every mistake is named."""
