"""Models from outside: hooks, predicted queries, support, fallback, drafts."""
