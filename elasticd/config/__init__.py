"""The configuration tree of the daemons and commands, with the credentials that it names."""
