"""What `shardlight init` makes projects from: one folder a template, and how they are found and generated."""
