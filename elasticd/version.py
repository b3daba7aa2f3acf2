"""The release of all four packages: built, printed, said in every hello and written into the store's schema."""

__version__ = "0.2.0.dev0"
