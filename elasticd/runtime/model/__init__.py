"""The user's model: sections, tensor-parallel rules, first values, random draws, and what is refused."""
