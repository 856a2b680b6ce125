"""Schedule: an assignment of the network -> explicit reshards and runs, and their peak memory."""
