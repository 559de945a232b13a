"""The study's claims, a module a topic: `press.say` evaluates and shows them."""
