"""Fixture modules shared by all tests."""

pytest_plugins = ["tests.model_fixtures", "tests.servers", "tests.skip_policy", "tests.stack.fixtures"]
