"""The tables and figures of the AdaFuse paper (arXiv 2601.06022), made anew on other models and questions."""
