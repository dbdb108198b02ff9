"""The HTTP server: connections, who is let in, bodies, the page, and the daemon behind them."""
