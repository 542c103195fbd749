"""Rules of view operators."""
