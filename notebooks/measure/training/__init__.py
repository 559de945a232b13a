"""Study 13's measuring side: MNIST, the published network, and a layer in it by many arms."""
