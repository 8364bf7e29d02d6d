"""Configurations: constructors and files are read alike, and every mistake is named."""
