"""Programs, tables and plans that several tests share."""
