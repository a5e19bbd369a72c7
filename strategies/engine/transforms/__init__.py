"""Changes to a model that leave an ordinary module behind; each is a function of the module."""
