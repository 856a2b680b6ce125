"""Reports: a plan record in; text, Markdown, HTML, IR listings, diagrams, traces and comparisons out."""
