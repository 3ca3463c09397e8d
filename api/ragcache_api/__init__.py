"""The outside faces of ragcache."""
