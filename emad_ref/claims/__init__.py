"""One claim, one module: what evidence it asks for, and the pure function that turns it into a verdict."""
