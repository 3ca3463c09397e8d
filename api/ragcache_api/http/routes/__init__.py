"""Routes of the service, one module for each subject."""
