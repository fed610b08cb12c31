"""One suite for every lease database: what a store promises."""
