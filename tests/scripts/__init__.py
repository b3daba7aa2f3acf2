"""Training scripts as users of other libraries write them: none of them knows of elasticd."""
