"""Pages that people look at: self-contained HTML, light and dark, no network."""
