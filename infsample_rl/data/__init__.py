"""Problems as prompts."""
