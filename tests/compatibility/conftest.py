"""The frozen distribution's own tests are run with what it installs, not collected here."""

collect_ignore = ["v01_distribution"]
