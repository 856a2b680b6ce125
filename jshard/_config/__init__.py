"""Configuration files. Input: YAML, dicts, rules of other libraries. Output: pins, reports of what does not match."""
