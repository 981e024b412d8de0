"""How the files that the package ships were made."""
