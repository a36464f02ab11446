"""Models written as an ordinary JAX user would, without a word about devices."""
