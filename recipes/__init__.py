"""How what the package ships was made."""
