"""Other people's libraries, one small module each. Nothing else in the package imports them."""
