"""Who is alive; and one failure, known on every rank, that ends every wait."""
