"""Laws over random programs and exhaustive enumerations, with their generators and reference implementations."""
