"""The private servers of the tests are tested themselves: what they promise, others build on."""
