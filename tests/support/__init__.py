"""What tests need beside the package itself: real servers, proxies that misbehave, threads that start together."""
