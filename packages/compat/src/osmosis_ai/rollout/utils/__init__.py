"""Empty: upstream's names in this package are internal and undocumented."""
