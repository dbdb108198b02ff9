"""What may follow a reply's last token: sources of drafts, and who decides how much of a draft a step gets."""
