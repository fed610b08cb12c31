"""The tests, and the private servers and processes they run on."""
