"""That this file is here puts its folder on the path: stand-ins that more than one room's tests use lie beside it."""
