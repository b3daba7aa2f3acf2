"""What of earlier releases this one works together with: tags, versions, golden bytes, kept wheels."""
