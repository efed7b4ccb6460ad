"""All output for people: text, pages, pictures. Only this package imports rich."""
