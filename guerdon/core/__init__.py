"""What everything else builds on: errors, records, images, files; imports nothing of ours."""
