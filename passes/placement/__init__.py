"""Where values live: the lattice of placements, and a table of transfer rules for each class of ops."""
