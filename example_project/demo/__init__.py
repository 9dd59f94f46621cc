"""The demos: what starts, tells and judges them. The application itself is in the folder above."""
