import mcbn
from trained import waves

net, train_loader, series, labels = waves()  # your trained network, series (N, channels, time)

bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=100)
pred = bayes.predict(series)

right = (pred.label == labels).float()
surer = pred.entropy < pred.entropy.median()
print(f"accuracy {right.mean():.2f}")
print(f"surer half {right[surer].mean():.2f}, other half {right[~surer].mean():.2f}")
