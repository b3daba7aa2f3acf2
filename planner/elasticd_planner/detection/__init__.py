"""Detection: stragglers, slow links and shifts of the data, from measured steps."""
