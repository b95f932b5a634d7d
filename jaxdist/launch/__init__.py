"""Jobs: their ranks are started, watched and ended."""
