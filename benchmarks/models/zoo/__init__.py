"""Networks that none of us wrote, to be planned from the batch strategy alone."""
