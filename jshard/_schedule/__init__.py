"""An assignment of the network -> explicit reshards and runs, their cost and peak memory."""
