"""Plans -> text, HTML, IR, graphs."""
